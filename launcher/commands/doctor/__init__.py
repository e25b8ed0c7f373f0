"""What `phalanx doctor` looks at: ranks, hosts, devices, links, disks, clocks and versions, each with what to do."""
