"""One suite for every implementation of a protocol: whoever implements it, its users notice no difference."""
