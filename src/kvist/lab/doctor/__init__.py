"""The doctor: symptoms of KV memory in what servers, logs and requests show. One target a file."""
