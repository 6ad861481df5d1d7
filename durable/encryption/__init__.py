"""Encryption of bodies: the keys, the cipher, and the ring that seals and opens."""
