"""A load on any server with OpenAI's API, and what it measures. Knows nothing of this project's server or engine."""
