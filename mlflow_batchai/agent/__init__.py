"""The agent, which runs on nodes: standard library only, Python 3.9, sent as one ``agent.pyz``."""
