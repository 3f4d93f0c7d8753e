"""The loop: from a checked request through compiled programs to the output and its statistics."""
