"""An HTTP server with OpenAI's API on an engine; requires `pip install "magicjax[serve]"`."""
