// etcd and every program of Kubernetes in one: it is the one whose name it is started by.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	_ "time/tzdata" // CronJobs name time zones

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 newKubelet,
}

// newKubelet calls what takes no context before Kubernetes 1.31.
func newKubelet() *cobra.Command {
	switch make := any(kubelet.NewKubeletCommand).(type) {
	case func() *cobra.Command:
		return make()
	case func(context.Context) *cobra.Command:
		return make(context.Background())
	}
	panic("the kubelet of this version is made in another way")
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	command, found := programs[name]
	if !found {
		names := []string{"etcd"}
		for known := range programs {
			names = append(names, known)
		}
		slices.Sort(names)
		fmt.Fprintf(os.Stderr, "%s: must be started by one of the names %v\n", name, names)
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
