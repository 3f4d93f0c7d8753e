"""The kernel for TPUs."""
