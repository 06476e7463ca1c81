"""Environments in a process of their own, perhaps on another Python with packages that clash with ours.

protocol  what goes over the socket        client  tasks and environments as the rollout sees them
server    the process: `python -m megatron_async.rollout.environments.served.server SOCKET`
"""
