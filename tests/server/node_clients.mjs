// Calls of the clients for JavaScript: `node node_clients.mjs URL KEY` prints an object with a value for each call.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { HumanMessage, ToolMessage } from '@langchain/core/messages';
import { tool as langTool } from '@langchain/core/tools';
import { ChatOpenAI, OpenAI as LangOpenAI } from '@langchain/openai';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const [baseURL, apiKey] = process.argv.slice(2);
const model = 'chatty', prompt = 'def add(a, b):', messages = [{ role: 'user', content: prompt }];
const found = {};
const note = async (name, call) => {
  try { found[name] = await call(); } catch (error) { found[name] = { error: String(error.message ?? error) }; }
};

const City = z.object({ city: z.enum(['Paris', 'Rome']) });
const weather = { name: 'weather', description: 'The weather.', strict: true,
  parameters: { ...z.toJSONSchema(City), $schema: undefined } };
const tools = [{ type: 'function', function: weather }];

const npm = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const { chat, responses } = npm;
await note('openai text', async () =>
  (await chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 })).choices[0].message.content);
await note('openai stream', async () =>
  (await chat.completions.stream({ model, messages, max_tokens: 16, temperature: 0 }).finalChatCompletion())
    .choices[0].message.content);
await note('openai object', async () => (await chat.completions.parse({ model, messages, max_tokens: 100,
  response_format: zodResponseFormat(City, 'thing') })).choices[0].message.parsed);
await note('openai tools', async () => JSON.parse((await chat.completions.stream({ model, messages, max_tokens: 100,
  tools, tool_choice: 'required', parallel_tool_calls: false }).finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments));
await note('openai responses', async () => (await responses.stream({ model, input: prompt, max_output_tokens: 16,
  temperature: 0 }).finalResponse()).output_text);
await note('openai responses object', async () => (await responses.parse({ model, input: prompt,
  max_output_tokens: 100, text: { format: zodTextFormat(City, 'thing') } })).output_parsed);
await note('openai large body', async () => {
  try { await npm.completions.create({ model, prompt: 'x'.repeat(600000) }); } catch (error) { return error.status; }
});

const settings = { prompt, maxOutputTokens: 100, maxRetries: 0 };
const short = { ...settings, maxOutputTokens: 16, temperature: 0 };
const kinds = { compatible: createOpenAICompatible({ name: 'x', baseURL, apiKey, supportsStructuredOutputs: true })(model),
  chat: createOpenAI({ baseURL, apiKey }).chat(model), responses: createOpenAI({ baseURL, apiKey })(model) };
for (const [kind, model] of Object.entries(kinds)) {
  await note(`ai ${kind} text`, async () => (await generateText({ model, ...short })).text);
  await note(`ai ${kind} stream`, async () => {
    let failure, text = '';
    const result = streamText({ model, ...short, onError: ({ error }) => { failure = error; } });
    for await (const part of result.textStream) text += part;
    if (failure) throw failure;
    return text;
  });
  await note(`ai ${kind} object`, async () => (await generateObject({ model, schema: City, ...settings })).object);
  await note(`ai ${kind} tools`, async () => (await generateText({ model, ...settings, toolChoice: 'required',
    providerOptions: { openai: { parallelToolCalls: false }, x: { parallel_tool_calls: false } }, stopWhen: stepCountIs(2), tools: { weather: tool({ description: 'The weather.', inputSchema: City,
      execute: async ({ city }) => ({ city }) }) } })).steps[0].toolResults[0].output);
}

const configuration = { configuration: { baseURL }, apiKey, model, maxRetries: 0 };
const lookUp = langTool(async ({ city }) => city, { name: 'weather', description: 'The weather.', schema: City });
for (const useResponsesApi of [false, true]) {
  const kind = useResponsesApi ? 'responses' : 'chat';
  const brief = new ChatOpenAI({ ...configuration, useResponsesApi, maxTokens: 16, temperature: 0 });
  const long = new ChatOpenAI({ ...configuration, useResponsesApi, maxTokens: 100 });
  await note(`langchain ${kind} text`, async () => (await brief.invoke(prompt)).text);
  await note(`langchain ${kind} stream`, async () => {
    let text = '';
    for await (const part of await brief.stream(prompt)) text += part.text;
    return text;
  });
  await note(`langchain ${kind} object`, async () => long.withStructuredOutput(City).invoke(prompt));
  await note(`langchain ${kind} tools`, async () => {
    const asked = [new HumanMessage(prompt)];
    const options = { tool_choice: useResponsesApi ? 'weather' : 'any', parallel_tool_calls: false };
    const answer = await long.bindTools([lookUp], options).invoke(asked);  // over Responses it leaves out 'any'
    const results = answer.tool_calls.map(({ id }) => new ToolMessage({ content: 'fine', tool_call_id: id }));
    await brief.invoke([...asked, answer, ...results]);
    return answer.tool_calls[0].args;
  });
}
await note('langchain completion', async () =>
  new LangOpenAI({ ...configuration, maxTokens: 16, temperature: 0 }).invoke(prompt));
console.log(JSON.stringify(found));
