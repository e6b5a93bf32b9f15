"""What runs on a node: standard library, Python 3.9, sent there as one ``agent.pyz``."""
