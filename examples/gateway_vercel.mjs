// The Vercel AI SDK with a tool: its OpenAI provider with our address. Every turn becomes a step.
//
//   headrace serve --vllm-addresses http://127.0.0.1:8001    # a vLLM that can do the task; see docs/gateway.md
//   npm install ai @ai-sdk/openai zod
//   node examples/gateway_vercel.mjs [http://127.0.0.1:8100]
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const gateway = process.argv[2] ?? "http://127.0.0.1:8100";
const post = async (url, body) => (await fetch(url, { method: "POST", body: JSON.stringify(body) })).json();
const { base_url } = await post(`${gateway}/init_trajectory`, {});

const openai = createOpenAI({ baseURL: `${base_url}/v1`, apiKey: "not-needed" });
const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const task = { model: openai("any"), tools: { add }, stopWhen: stepCountIs(8) };

// A question whole, and one about its answer as a stream: the SDK refers to earlier answers by the ids of their items.
const messages = [{ role: "user", content: "What is 2 + 3?" }];
const first = await generateText({ ...task, messages });
console.log(first.text);
messages.push(...first.response.messages, { role: "user", content: "And 5 more?" });
const second = streamText({ ...task, messages });
console.log(await second.text);

const reward = (await second.text).includes("10") ? 1 : 0;
console.log(JSON.stringify(await post(`${base_url}/complete_trajectory`, { reward })));
