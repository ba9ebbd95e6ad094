"""What a config can say, for people: descriptions of keys and names, from which come the answers of
`fedmuon config explain` and `fedmuon list`, and the tables of docs/config.md."""
