"""Measurements that are run once for a table; nothing else imports them."""
