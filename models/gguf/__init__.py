"""GGUF files of llama.cpp: metadata, tokenizers and quantized blocks."""
