"""Tables, figures and a self-contained HTML page of a folder of results."""
