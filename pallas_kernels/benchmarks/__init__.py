"""Commands that time, tune and validate the attention kernels on a device."""
