"""What this machine is, made ready and checked, without starting the device."""
