"""What runs on a node: standard library, Python 3.8, sent there as one ``agent.pyz``."""
