"""A chat template in the manner of Gemma 4's, whose constructs it has: macros,
namespaces, thoughts between special tokens, tools and their answers."""

OPEN, CLOSE = '<|channel>', '<channel|>'
# Special tokens; `<turn|>` ends a turn, and `<|tool_response>` asks for one.
SPECIALS = (
  *('<|turn>', '<turn|>', OPEN, CLOSE, '<|think|>', '<|tool>', '<tool|>'),
  *('<|tool_call>', '<tool_call|>', '<|tool_response>', '<tool_response|>'),
)
TEMPLATE = """
{%- macro quoted(value) -%}
  {%- if value is string -%}<|"|>{{ value }}<|"|>
  {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
  {%- elif value is mapping -%}
    { {%- for key, x in value | dictsort -%}
      {{ key }}:{{ quoted(x) }}{{ ',' if not loop.last }}
    {%- endfor -%} }
  {%- elif value is sequence -%}
    [{%- for x in value -%}
      {{ quoted(x) }}{{ ',' if not loop.last }}
    {%- endfor -%}]
  {%- else -%}{{ value }}
  {%- endif -%}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
  {%- set kept = namespace(text='') -%}
  {%- for part in text.split('<channel|>') -%}
    {%- set kept.text = kept.text + part.split('<|channel>')[0] -%}
  {%- endfor -%}
  {{- kept.text | trim -}}
{%- endmacro -%}
{{- bos_token -}}
{%- set last = namespace(user=-1, is_response=false) -%}
{%- set is_thinking = enable_thinking | default(false) -%}
{%- set has_system = messages[0].role in ['system', 'developer'] -%}
{%- if is_thinking or tools or has_system -%}
  {{- '<|turn>system\\n' -}}
  {{- '<|think|>\\n' if is_thinking -}}
  {{- messages[0].content | trim if has_system -}}
  {%- for tool in tools or [] -%}
    <|tool>declaration:{{ tool.function.name }}
    {{- quoted(tool.function.parameters) }}<tool|>
  {%- endfor -%}
  {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages if message.role == 'user' -%}
  {%- set last.user = messages.index(message) -%}
{%- endfor -%}
{%- for message in messages[1 if has_system else 0:] -%}
  {%- if message.role == 'tool' -%}
    <|tool_response>response:{{ message.name | default('unknown') -}}
    {value:{{ quoted(message.content) }}}<tool_response|>
    {%- set last.is_response = true -%}
  {%- else -%}
    {%- if not last.is_response -%}
      {{- '<|turn>' + message.role.replace('assistant', 'model') + '\\n' -}}
    {%- endif -%}
    {%- if message.reasoning_content and message.tool_calls
        and loop.index0 > last.user -%}
      {{- '<|channel>thought\\n' + message.reasoning_content + '<channel|>' -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      <|tool_call>call:{{ call.function.name }}
      {{- quoted(call.function.arguments) }}<tool_call|>
    {%- endfor -%}
    {%- if message.content is string -%}
      {%- if message.role == 'assistant' -%}
        {{- without_thoughts(message.content) -}}
      {%- else -%}
        {{- message.content | trim -}}
      {%- endif -%}
    {%- elif message.content is sequence -%}
      {%- for part in message.content if part.type == 'text' -%}
        {{- without_thoughts(part.text) -}}
      {%- endfor -%}
    {%- endif -%}
    {{- '<turn|>\\n' if not message.tool_calls -}}
    {%- set last.is_response = false -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|turn>model\\n' if not last.is_response -}}
  {{- '<|channel>thought\\n<channel|>' if not is_thinking -}}
{%- endif -%}
"""
