// The server as the page sees it: requests with the API key, and answers as one ordered stream of events.
// Events: {kind: "reasoning" | "text", text}, {kind: "call", id, name}, {kind: "arguments", id, text},
// {kind: "result", id, text, failed}, {kind: "usage", prompt, completion, cached}, {kind: "finish", reason}.

const KEY = "phalanx.key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "",
  set(value, keep) {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    if (value) (keep ? localStorage : sessionStorage).setItem(KEY, value);
  },
};

async function send(path, body, signal) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store",
  });
  if (answer.ok) return answer;
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* no JSON: a proxy has answered */ }
  throw new ApiError(answer.status, message);
}

export const models = async () => (await (await send("v1/models")).json()).data;

// {status, progress, running, waiting}; "unreachable" where no server answers.
export async function health() {
  try {
    return await (await fetch("health", { cache: "no-store" })).json();
  } catch {
    return { status: "unreachable" };
  }
}

// Tool servers: {name: {status, tools, message}}; none where the server has none, or knows of none.
export async function toolServers() {
  try {
    return (await (await send("v1/mcp/tools")).json()).servers ?? {};
  } catch {
    return {};
  }
}

async function* serverEvents(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
      if (data.trim() && data.trim() !== "[DONE]") yield JSON.parse(data);
    }
  }
}

const sampling = (settings) => Object.fromEntries(
  ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"]
    .filter((name) => settings[name] !== undefined && settings[name] !== "")
    .map((name) => [name, Number(settings[name])]),
);

// Ask for the next message. messages: OpenAI's; settings: as settings.js has them; servers: names of tool servers.
export async function* ask({ messages, settings, servers, goOn, signal }) {
  const body = { model: settings.model || undefined, stream: true, ...sampling(settings) };
  if (settings.thinking === "on" || settings.thinking === "off") body.enable_thinking = settings.thinking === "on";
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  const longest = Number(settings.max_tokens) || undefined;
  const tools = settings.tools?.trim() ? JSON.parse(settings.tools) : [];
  if (servers.length) {
    yield* asResponse({ ...body, max_output_tokens: longest, input: items(messages), store: false, tools: [
      ...servers.map((name) => ({ type: "mcp", server_label: name, require_approval: "never" })),
      ...tools.map((tool) => ({ type: "function", ...tool.function })),
    ] }, signal);
    return;
  }
  if (goOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  const usage = { include_usage: true, continuous_usage_stats: true };
  yield* asChat({ ...body, max_tokens: longest, messages, tools, stream_options: usage }, signal);
}

async function* asChat(body, signal) {
  const ids = {};
  for await (const event of serverEvents(await send("v1/chat/completions", body, signal))) {
    if (event.error) throw new ApiError(event.error.code, event.error.message);
    for (const { delta, finish_reason: reason } of event.choices) {
      if (delta.reasoning_content) yield { kind: "reasoning", text: delta.reasoning_content };
      if (delta.content) yield { kind: "text", text: delta.content };
      for (const call of delta.tool_calls ?? []) {
        if (call.id) {
          ids[call.index] = call.id;
          yield { kind: "call", id: call.id, name: call.function.name };
        }
        if (call.function?.arguments) yield { kind: "arguments", id: ids[call.index], text: call.function.arguments };
      }
      if (reason) yield { kind: "finish", reason };
    }
    if (event.usage) yield usageOf(event.usage.prompt_tokens, event.usage.completion_tokens, event.usage.prompt_tokens_details);
  }
}

const usageOf = (prompt, completion, details) => ({ kind: "usage", prompt, completion, cached: details?.cached_tokens ?? 0 });

async function* asResponse(body, signal) {
  for await (const event of serverEvents(await send("v1/responses", body, signal))) {
    const item = event.item ?? {};
    const called = item.type === "mcp_call" || item.type === "function_call";
    if (event.type === "response.reasoning_text.delta") yield { kind: "reasoning", text: event.delta };
    else if (event.type === "response.output_text.delta") yield { kind: "text", text: event.delta };
    else if (event.type?.endsWith("call_arguments.delta")) yield { kind: "arguments", id: event.item_id, text: event.delta };
    else if (event.type === "response.output_item.added" && called) yield { kind: "call", id: item.id, name: item.name, server: item.server_label };
    else if (event.type === "response.output_item.done" && item.type === "mcp_call") {
      const error = item.error && (item.error.message ?? JSON.stringify(item.error));
      yield { kind: "result", id: item.id, text: error || item.output || "", failed: Boolean(error) };
    } else if (event.response && ["response.completed", "response.incomplete", "response.failed"].includes(event.type)) {
      const { usage, error, incomplete_details: cut } = event.response;
      if (error) throw new ApiError(error.code, error.message);
      if (usage) yield usageOf(usage.input_tokens, usage.output_tokens, usage.input_tokens_details);
      yield { kind: "finish", reason: cut ? "length" : "stop" };
    }
  }
}

// A chat's messages as the items of /v1/responses.
function items(messages) {
  return messages.flatMap((one) => {
    if (one.role === "tool") return [{ type: "function_call_output", call_id: one.tool_call_id, output: one.content }];
    const calls = (one.tool_calls ?? []).map((call) => ({ type: "function_call", call_id: call.id, ...call.function }));
    return one.content ? [{ role: one.role, content: inputs(one.content) }, ...calls] : calls;
  });
}

const inputs = (content) => typeof content === "string" ? content : content.map((part) => (
  part.type === "text" ? { type: "input_text", text: part.text } : { type: "input_image", image_url: part.image_url.url }));
