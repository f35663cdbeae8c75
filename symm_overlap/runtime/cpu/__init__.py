"""The back end for CPUs: ranks are processes of one host that map each other's memory."""
