"""Tools for models whose chat template knows none: written into the messages as text.

The form is that of the Hermes and Qwen models, which small models have seen most of: calls within <tool_call>, results
within <tool_response>. Source: https://github.com/NousResearch/Hermes-Function-Calling.
"""

import json
from typing import Any

TOOLS = """You can call these functions. Each line is one of them, with the JSON schema of its arguments.
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and its arguments, between these tags:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def with_tools_as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The same messages with the roles system, user and assistant alone, the tools told in the first of them."""
    written: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            # The results of calls that were made at once are one turn.
            if written and written[-1]["role"] == "user" and written[-1]["content"].endswith("</tool_response>"):
                written[-1]["content"] += f"\n{response}"
            else:
                written.append({"role": "user", "content": response})
            continue
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in message.get("tool_calls") or []
        ]
        written.append({"role": message["role"], "content": "\n".join([content, *calls] if content else calls)})
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        told = TOOLS.format(tools=lines)
        if written and written[0]["role"] == "system":
            told = f"{written.pop(0)['content']}\n\n{told}"
        written.insert(0, {"role": "system", "content": told})
    return written
