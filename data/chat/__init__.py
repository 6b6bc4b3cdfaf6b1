"""Conversations: records in the OpenAI `messages` shape become documents in the V4.1 format.

The format (V4.1 report, arXiv 2609.19969, post-training; released encoder), control tokens in brackets:

    [BOS][System]Reasoning Effort: 75 (...)\\n\\n<system text>
    [User]<user text>[Assistant][<think>]<reasoning>[</think>]<answer>[EOS]

The effort line is written in thinking mode only; [System] then precedes it even without a system text. In chat mode,
and in turns whose reasoning is dropped, an answer is [Assistant][</think>]<answer>[EOS].

Reasoning before the last user turn is dropped, unless the conversation has tools. So only the last answer can have its
reasoning, and a conversation becomes one document per answer, in which that answer alone is supervised. Supervised are
the reasoning, the `</think>` after it, the answer, tool calls and EOS; the header of an answer and the texts of system,
user and tools are not.

A record has `messages`, and optionally `tools`, `effort`, `thinking`, `system` (a text before the messages) and
`images` (for the marks <image> in the texts of users). Without `thinking`, an answer is in thinking mode if it has
reasoning; with tools, all answers are if any has reasoning.
A message has `role` (system or developer, user, assistant, tool), `content` (text, or a list of text parts and, for
users, image parts), `reasoning_content`, `tool_calls`, `tool_call_id` and `weight` (0: this answer is not supervised).

Our choices where the report is silent; the first four follow the released encoder:
- messages and tool results of one user turn, and the parts of a message, are joined by a blank line;
- a system message inside a conversation opens a turn, as a user message does;
- tool calls follow the answer after a blank line as `<[｜DSML｜] calls>`, in it `<[｜DSML｜] invoke name="...">` and
  `<[｜DSML｜] parameter name="..." string="true|false">`: strings as they are, everything else as JSON;
- tools are listed at the end of the system text, one function schema in JSON per line; the words around them are ours;
- a conversation has tools if the record or a system message lists some, or if an answer calls one.

Read in this order; each file imports only those before it:

    conversation    a checked record, efforts
    render          conversation to documents
    read            record to conversation
    formats         records of other frameworks
    source          files of records, data sets
    prompt          messages to token ids to answer

`chat_template.jinja` writes the same format for other programs.
"""
