"""The command line: `kvferry serve`, `kvferry demo`, `kvferry bench ipc | store`."""
