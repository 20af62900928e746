"""Cuts a module after a named submodule: head (compiled) and tail (stays in torch)."""

from lightning_npu.compile.split.splitter import split_module as split_module
