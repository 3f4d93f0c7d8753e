"""magicjax compared with Hugging Face transformers and llama.cpp on the same weights."""
