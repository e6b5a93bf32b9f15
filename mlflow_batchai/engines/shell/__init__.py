"""Commands on other machines over SSH: where a machine is (``target``), and a kept-open connection to it (``connection``)."""
