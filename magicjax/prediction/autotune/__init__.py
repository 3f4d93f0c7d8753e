"""`drafter="auto"`: short trials, a plan, a timed comparison, and an adaptive depth."""
