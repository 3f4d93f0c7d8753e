"""Commands that time, tune and validate attention kernels on a device."""
