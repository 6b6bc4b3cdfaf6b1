"""Turns conversations (records in the OpenAI `messages` format) into training documents in the V4.1 chat format.

The V4.1 chat format (V4.1 report, arXiv 2609.19969, post-training; released encoder) is as follows, with control tokens
in brackets:

    [BOS][System]Reasoning Effort: 75 (...)\\n\\n<system text>
    [User]<user text>[Assistant][<think>]<reasoning>[</think>]<answer>[EOS]

The line with the reasoning effort is written in thinking mode only, and then [System] is written before it even if
there is no system text. In chat mode, and in turns whose reasoning is dropped, an answer is written as
[Assistant][</think>]<answer>[EOS].

The reasoning before the last user turn is dropped, unless the conversation has tools. In a document only the last
answer can therefore have its reasoning, so a conversation becomes one document per answer, in which only that answer is
supervised (trained on). The supervised tokens are the reasoning, the `</think>` after it, the answer, tool calls and
EOS; the header of an answer and the texts of the system, the user and the tools are not supervised.

A record has the key `messages`, and optionally `tools`, `effort`, `thinking`, `system` (a text before the messages) and
`images` (which replace the marks <image> in the user's texts). If a record does not set `thinking`, an answer is in
thinking mode if it has reasoning; in a conversation with tools, all answers are in thinking mode if any answer has
reasoning. A message has the keys `role` (system, developer, user, assistant or tool), `content` (text or a list of text
parts; user messages may also have image parts), `reasoning_content`, `tool_calls`, `tool_call_id` and `weight` (0 means
that this answer is not supervised).

The report does not specify the following points, so they are our choices; the first four follow the released encoder:
- the messages and tool results of one user turn, and the parts of one message, are joined by a blank line;
- a system message inside a conversation starts a new turn, as a user message does;
- tool calls follow the answer after a blank line, written as `<[｜DSML｜] calls>` that contains `<[｜DSML｜] invoke
  name="...">` and `<[｜DSML｜] parameter name="..." string="true|false">`; parameters that are strings are written as
  they are, all others as JSON;
- tools are listed at the end of the system text, one JSON function schema per line; the text around this list
  is our choice;
- a conversation counts as one with tools if the record or a system message lists tools, or if an answer calls a tool.

Read the files in this order; each file imports only files listed before it:

    conversation:   a validated conversation, and reasoning efforts.
    render:         turns a conversation into documents.
    read:           turns a record into a conversation.
    formats:        converts the record formats of other frameworks.
    source:         reads conversations from files and data sets.
    prompt:         turns messages into the token ids of a prompt.

The file `chat_template.jinja` renders the same format in other programs.
"""
