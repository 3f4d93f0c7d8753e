"""Tables, charts and a page of a folder of results."""
