"""Tables, figures and the self-contained report page of a folder of results."""
