"""Checks of `phalanx doctor`: ranks, hosts, devices, links, disks, clocks and versions, each with what to do."""
