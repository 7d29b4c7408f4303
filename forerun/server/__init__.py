"""The OpenAI-compatible server: HTTP in front of one engine. Nothing imports it but the command
line."""
