"""Commands that time steps, rounds and operations of the loop."""
