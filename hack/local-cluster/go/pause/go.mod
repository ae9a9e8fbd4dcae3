module stage2.dev/local-cluster/pause

go 1.24.0
