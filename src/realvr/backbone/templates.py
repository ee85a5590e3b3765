"""Chat templates of the five families, written for this project: they render text and images as the official ones do.

Small checkpoints need one because a prompt built for a tiny model must have the shape it will have for the real one.
Tools, videos and thinking modes are left out: nothing in this project renders them. Message content is a string or a
list of ``{"type": "text", "text": ...}`` and ``{"type": "image"}`` parts.
"""

from __future__ import annotations

_PARTS = """\
{%- macro parts(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'image' -%}{{- @IMAGE@ -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""

_CHATML = """\
{%- for message in messages -%}
@DEFAULT@
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{{- parts(message['content']) -}}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_DEFAULT_SYSTEM = """\
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}"""

_GEMMA = """\
{%- macro parts(content) -%}
{%- if content is string -%}{{- content | trim -}}
{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'image' -%}{{- '<start_of_image>' -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set preamble = namespace(text='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- if not loop.first -%}{{- raise_exception('Gemma takes a system message in first place only') -}}{%- endif -%}
{%- if message['content'] is string -%}{%- set preamble.text = message['content'] -%}
{%- else -%}
{%- for part in message['content'] -%}{%- set preamble.text = preamble.text + part['text'] -%}{%- endfor -%}
{%- endif -%}
{%- set preamble.text = preamble.text + '\\n\\n' -%}
{%- else -%}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' + preamble.text -}}
{%- set preamble.text = '' -%}
{{- parts(message['content']) -}}
{{- '<end_of_turn>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


def _chatml(image: str, default_system: bool = False) -> str:
    """ChatML with ``image`` (a Jinja string literal) where an image stands."""
    turns = _CHATML.replace("@DEFAULT@", _DEFAULT_SYSTEM if default_system else "")
    return _PARTS.replace("@IMAGE@", image) + turns


_QWEN_IMAGE = "'<|vision_start|><|image_pad|><|vision_end|>'"

CHAT_TEMPLATES: dict[str, str] = {
    "qwen2.5-vl": _chatml(_QWEN_IMAGE, default_system=True),
    "qwen3-vl": _chatml(_QWEN_IMAGE),
    "qwen3-vl-moe": _chatml(_QWEN_IMAGE),
    "internvl3": _chatml(r"'<IMG_CONTEXT>\n'"),
    "gemma3": _GEMMA,
}
