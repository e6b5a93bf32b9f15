"""Commands on other machines over SSH: the address (``target``) and the kept-open connection (``connection``)."""
