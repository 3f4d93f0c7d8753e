"""Verification and sampling: which drafted tokens the target accepts."""
