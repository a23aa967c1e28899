// Asks the server, with the key that the user typed, and says in words what went wrong. Knows nothing of the page.

const KEY = "baton-api-key";

export class KeyNeeded extends Error {}
export class NotAnswering extends Error {}
export class Refused extends Error {}

export const rememberKey = (key) => sessionStorage.setItem(KEY, key);

function headersWith(headers) {
  const all = new Headers(headers);
  const key = sessionStorage.getItem(KEY);
  try {
    if (key) all.set("Authorization", `Bearer ${key}`);
  } catch {
    throw new KeyNeeded("This API key has characters that cannot be sent.");
  }
  return all;
}

async function reason(response) {
  let words = `The server answered with HTTP ${response.status}.`;
  try {
    words = (await response.json()).error.message;
  } catch {
    // no error object: a proxy's page, for example
  }
  const wait = response.headers.get("Retry-After");
  return wait ? `${words} (HTTP ${response.status}; try again in ${wait} s)` : words;
}

/** Return the response of a request that succeeded, or of one with a status of `others`. */
export async function ask(path, options = {}, others = []) {
  const headers = headersWith(options.headers);
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new NotAnswering("The server does not answer.");
  }
  if (response.ok || others.includes(response.status)) return response;
  const words = await reason(response);
  throw response.status === 401 ? new KeyNeeded(words) : new Refused(words);
}

/** Return what a request's response has in it, as "json" or "text". */
export async function read(path, kind, options, others) {
  const response = await ask(path, options, others);
  try {
    return await response[kind]();
  } catch {
    throw new NotAnswering("The server's answer is not whole, or not Baton's.");
  }
}

/** Yield the data of each server-sent event, parsed, up to [DONE]; an event may say that it failed. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new NotAnswering("The connection broke before the answer was complete.");
    }
    if (piece.done) throw new NotAnswering("The answer ended before it was complete.");
    const parts = (rest + piece.value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message);
      yield event;
    }
  }
}
