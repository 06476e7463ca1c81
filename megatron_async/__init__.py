"""Asynchronous RL for LLM agents: Megatron-core trains, SGLang samples, and no old logit is lost."""

__version__ = "0.1.0"
