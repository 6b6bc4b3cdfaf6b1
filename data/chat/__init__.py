"""Conversations: JSONL in the OpenAI `messages` shape -> documents in the V4.1 format, with only assistant text taught.

The format (V4.1 report, arXiv 2609.19969, post-training; released encoder), control tokens in brackets:

    [BOS][System]Reasoning Effort: 75 (...)\\n\\n<system text>
    [User]<user text>[Assistant][<think>]<reasoning>[</think>]<answer>[EOS]

The effort line is there in thinking mode only, and then [System] is too, system text or not. In chat mode, and in
turns whose reasoning is dropped, a turn is [Assistant][</think>]<answer>[EOS]. Reasoning before the last user turn is
dropped unless the conversation has tools: since an answer has its reasoning only while it is the last, such a record
becomes one document for each answer, and each teaches that answer alone. Taught are reasoning, `</think>` behind it,
answer, tool calls and EOS; never the header, system, user or tool text.

A record: `messages`, and optionally `tools`, `effort` and `thinking`. Without `thinking`, an answer is in thinking mode
if it has reasoning; with tools, all are if any has.
Message: `role` (system or developer, user, assistant, tool), `content` (text, or a list of text parts and, from users,
image parts), `reasoning_content`, `tool_calls`, `tool_call_id`, `weight` (0: an assistant message not to be taught).

Our choices, where the report is silent; the first four follow the released encoder:
- messages and tool results of one user turn, and the parts of a message, are joined by a blank line;
- a system message inside a conversation opens a turn as a user message does;
- tool calls follow the answer after a blank line as `<[｜DSML｜] calls>`, in it `<[｜DSML｜] invoke name="...">` and
  `<[｜DSML｜] parameter name="..." string="true|false">`: strings as they are, all else as JSON;
- tools stand at the end of the system text, one function schema in JSON a line; the words around them are ours;
- a conversation has tools if a record or system message lists some or an assistant calls one.

Read in this order: `conversation` (a checked record, efforts), `render` (conversation -> documents), `read` (record ->
conversation), `source` (a file of records) and `prompt` (messages -> token ids to answer). `chat_template.jinja` writes
the same format for other programs.
"""
