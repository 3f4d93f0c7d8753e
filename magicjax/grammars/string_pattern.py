r"""Patterns of strings, as JSON schemas have them, as regular expressions of JSON text.

A pattern describes the characters of a string; a grammar describes JSON text, in which quotes and
backslashes are escaped and control characters do not occur. Other escapes are not generated.

  a.b    a[^"\\\x00-\x1f]b
  "+     (?:\\")+
  [^a]   [[^a]&&[^"\\\x00-\x1f]]
"""

import re

PLAIN = r'[^"\\\x00-\x1f]'  # the characters that JSON text has unescaped
# ASCII, as in JavaScript, whose patterns JSON Schema has.
CLASSES = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": " "}
ESCAPED = {'"': r"(?:\\\")", "\\": r"(?:\\\\)"}
OF_PROPERTY = re.compile(r"\\[pP](\{[^{}]*\}|.)")
SET_OPERATORS = ("[", "&&", "--", "~~")  # in classes of Rust's `regex`; literal in JavaScript


def as_json(pattern: str) -> str:
    """Returns an expression for the JSON text of the strings that match a pattern as a whole.

    Args:
      pattern: with the syntax of Rust's crate `regex`; `^` at its begin and `$` at its end are
        omitted.

    Raises:
      ValueError: flags, look-around, named groups, or an escape that is not supported.
    """
    body = pattern.removeprefix("^")
    if re.search(r"(?<!\\)(\\\\)*\$\Z", body):
        body = body[:-1]
    parts, start = [], 0
    while start < len(body):
        end = _token_end(body, start)
        parts.append(_translated(body[start:end]))
        start = end
    return f"(?:{''.join(parts)})"


def _token_end(body: str, start: int) -> int:
    """Returns the end of the escape, class or character that begins at `start`."""
    if body.startswith("(?", start) and not body.startswith("(?:", start):
        raise _unsupported("(?", "look-around, flags and named groups are not supported")
    if body[start] == "\\":
        found = OF_PROPERTY.match(body, start)
        return found.end() if found else start + 2
    if body[start] != "[":
        return start + 1
    found = re.compile(r"\[\^?([^\\\]]|\\.)+\]", re.DOTALL).match(body, start)
    if not found:
        raise _unsupported("[", "a class has at least one character and ends with ']'")
    return found.end()


def _translated(token: str) -> str:
    """Returns the expression of JSON text for an escape, a class or a character."""
    if token == ".":
        return PLAIN
    if token[0] == "[":
        inner = re.sub(r"\\.", "", token[1:])
        for operator in SET_OPERATORS:
            if operator in inner:
                raise _unsupported(operator, f"write \\{operator[0]} in a class")
        if token[1] != "^":
            token = re.sub(r"\\(.)", lambda x: CLASSES[x[1]] if x[1] in ("d", "w") else x[0], token)
        return f"[{token}&&{PLAIN}]"
    if token in ("^", "$"):
        raise _unsupported(token, "it may be at the begin or at the end only")
    if token[0] != "\\":
        return ESCAPED.get(token, token)
    name = token[1:]
    if name in CLASSES:
        return CLASSES[name]
    if name in ("D", "W", "S") or name[:1] in ("p", "P"):
        return f"[{token}&&{PLAIN}]"
    if not name or name.isalnum():
        raise _unsupported(token, "write the character itself, or a class")
    return ESCAPED.get(name, name if name in "<>" else token)


def _unsupported(what: str, why: str) -> ValueError:
    return ValueError(f"a pattern of the JSON schema has {what!r}, which is not supported: {why}")
