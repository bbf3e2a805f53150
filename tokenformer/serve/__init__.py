"""The server of language models: the OpenAI protocol and a page in front of one engine."""
