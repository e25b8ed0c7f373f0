"""LlamaIndex as a client: `python llama_index_client.py BASE MODEL [IMAGE]` prints what it got as JSON.

A program of its own, as the package needs an openai client of version 2: tests/test_clients.py starts it.
"""

import asyncio
import json
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

SUM, WEATHER = "What is 47 + 38?", "What is the weather in Paris?"


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"rain in {city}"


def main(base: str, model: str) -> dict:
    def client(**more):
        options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048, **more}
        return OpenAILike(model=model, api_base=base, api_key="none", max_retries=0, **options)

    llm, asked, tools = client(), [ChatMessage(role="user", content=SUM)], [FunctionTool.from_defaults(get_weather)]

    def called(answer):
        return [(call.tool_name, call.tool_kwargs) for call in llm.get_tool_calls_from_response(answer)]

    async def asynchronously():
        own = client()
        parts = [part.delta or "" async for part in await own.astream_chat(asked)]
        agent = FunctionAgent(tools=tools, llm=own)
        calls = []
        handler = agent.run(WEATHER)
        async for event in handler.stream_events():
            if type(event).__name__ == "ToolCallResult":
                calls.append((event.tool_name, event.tool_output.content))
        await handler
        return (await own.achat(asked)).message.content, "".join(parts), calls

    *_, last = llm.stream_chat_with_tools(tools, user_msg=WEATHER)
    achat, astream, agent = asyncio.run(asynchronously())
    return {
        "chat": llm.chat(asked).message.content,
        "stream": "".join(part.delta or "" for part in llm.stream_chat(asked)),
        "calls": called(llm.chat_with_tools(tools, user_msg=WEATHER)),
        "streamed calls": called(last),
        "required": called(llm.chat_with_tools(tools, user_msg=WEATHER, tool_required=True)),
        "completion": client(is_chat_model=False, max_tokens=4).complete("The sky is").text,
        "achat": achat,
        "astream": astream,
        "agent": agent,
    }


def ask_about(base: str, model: str, image: str) -> str:
    options = {"is_chat_model": True, "context_window": 2048, "max_tokens": 8, "temperature": 0}
    llm = OpenAILike(model=model, api_base=base, api_key="none", max_retries=0, **options)
    blocks = [ImageBlock(path=image), TextBlock(text="What is it?")]
    return llm.chat([ChatMessage(role="user", blocks=blocks)]).message.content


if __name__ == "__main__":
    print(json.dumps((main if len(sys.argv) == 3 else ask_about)(*sys.argv[1:])))
