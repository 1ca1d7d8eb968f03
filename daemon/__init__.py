"""The per-node daemon, its wire protocol, its client and its command line."""
