"""The methods of the RPC and their shapes, one file a group. Refuses behaviour: these are declarations."""
