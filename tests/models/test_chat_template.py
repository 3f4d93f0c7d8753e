"""The token that ends a turn, by the chat template."""

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

import models

TOKENS = ["</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|eot|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
TEMPLATES = {
    "none": (None, None),
    "ChatML": (CHATML, "<|im_end|>"),
    "Llama 2": (LLAMA_2, "</s>"),
    "the longest name": (CHATML.replace("<|im_end|>", "<|eot_id|>"), "<|eot_id|>"),
    "only users": ("{{ messages[0].content }}", None),
    "text": (CHATML.replace("<|im_end|>", "###"), None),
    "an error": ("{{ raise_exception('no') }}", None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_follows_an_answer(name):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    backend.add_special_tokens(TOKENS)
    template, end = TEMPLATES[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
    expected = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert models.end_of_turn(tokenizer) == expected


def test_without_a_tokenizer_there_is_none():
    assert models.end_of_turn(None) is None
