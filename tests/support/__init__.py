"""What tests share: faults to inject, and stand-ins for what a test is not about."""
