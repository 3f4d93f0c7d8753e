"""Commands that time and validate the attention kernels on a device."""
