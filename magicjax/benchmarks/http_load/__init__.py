"""Load on HTTP servers with OpenAI's API: requests, what is measured of them, and reports."""
