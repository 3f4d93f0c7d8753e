"""What chat templates say about the end of an answer."""

from typing import Any

ANSWER = "The answer"  # no template changes it
CONVERSATION = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": ANSWER}]


def end_of_turn(tokenizer: Any) -> int | None:
    """Returns the token that follows an answer in the tokenizer's chat template, as <|im_end|>.

    None: without a template, or if text follows an answer.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    import jinja2  # the language of templates, needed only for text

    try:
        text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError):  # it refuses such messages
        return None
    _, _, rest = text.rpartition(ANSWER)
    tokens = {str(each): token for token, each in tokenizer.added_tokens_decoder.items()}
    following = [name for name in tokens if rest.lstrip().startswith(name)]
    return tokens[max(following, key=len)] if following else None
