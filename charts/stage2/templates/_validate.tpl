{{/* `helm upgrade --reuse-values` brings the values of an older chart, which lack what this one has added. Named here is
     each value whose absence is not its default; a default that is an empty list or map, false or "" may be absent. */}}
{{- define "stage2.validateValues" -}}
{{- $needed := list
      "image.pullPolicy"
      "crd.install" "crd.refuseUnknownKeys" "crd.keep"
      "controller.replicas" "controller.podDisruptionBudget" "controller.placement" "controller.concurrency"
      "controller.progressSeconds" "controller.logLevel" "controller.networkPolicy"
      "controller.podSecurityContext" "controller.securityContext"
      "controller.startupProbe" "controller.livenessProbe" "controller.readinessProbe"
      "policy.admission" "policy.hostPaths" "policy.imageRegistries" "policy.labels" "policy.pullSecrets"
      "policy.serviceAccounts" "policy.secrets"
      "policy.runtimeClasses" "policy.resourceClaimTemplates" "policy.longestStartSeconds"
      "policy.writableHostPaths" "policy.nfs" "policy.claims" "policy.storageClasses" "policy.configMaps"
      "policy.annotations" "policy.groups" "policy.rewardFiles"
      "metrics.serviceMonitor.interval" "metrics.serviceMonitor.honorLabels"
      "metrics.podMonitor.interval" "metrics.podMonitor.honorLabels" "metrics.prometheusRule" "metrics.dashboard"
      "rbac.aggregate" "serviceAccount.create" -}}
{{- range $path := $needed -}}
{{- $here := $.Values -}}
{{- range splitList "." $path -}}
{{- $here = get ($here | default dict) . -}}
{{- if or (kindIs "invalid" $here) (and (kindIs "string" $here) (not $here)) -}}
{{- fail (printf "%s is required; set it, and not to null or \"\"; if you upgrade, the values may be those of an older chart: use --reset-then-reuse-values instead of --reuse-values" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Values of older charts, which an upgrade brings along. Helm's own words about them name no way out. */}}
{{- define "stage2.validateOldValues" -}}
{{- $image := .Values.image | default dict -}}
{{- with .Values.workloadImage -}}
{{- $name := "" -}}
{{- if kindIs "map" . -}}
{{- $name = .repository | default "REPOSITORY/trainer" -}}
{{- with .tag -}}
{{- $name = printf "%s:%s" $name . -}}
{{- end -}}
{{- end -}}
{{- $own := printf "%s:%s" ($image.repository | default "REPOSITORY/controller") ($image.tag | default $.Chart.AppVersion) -}}
{{- fail (printf "workloadImage: %s; older charts had it; the images of both parts are named under image: add --set workloadImage=null,image.repository=FOLDER,image.tag=TAG with the registry's folder that has the images controller and trainer, or name each one: --set workloadImage=null,image.repository=,image.tag=,image.controller=%s,image.trainer=%s" ($name | default "set") $own ($name | default "REPOSITORY/trainer:TAG")) -}}
{{- end -}}
{{- if not (has (kindOf (get (.Values.controller | default dict) "patienceSeconds")) (list "invalid" "string")) -}}
{{- fail (printf "controller.patienceSeconds: %v; older charts had it; spec.learner.startDeadlineSeconds of a job bounds its start: add --set controller.patienceSeconds=null" .Values.controller.patienceSeconds) -}}
{{- end -}}
{{- $last := splitList "/" (trimSuffix "/" ($image.repository | default "")) | last -}}
{{- if and (has $last (list "controller" "trainer")) (not (and $image.controller $image.trainer)) -}}
{{- fail (printf "image.repository: %s; must be the folder that has the images controller and trainer: write %s, or name each image under image.controller and image.trainer" $image.repository (trimSuffix (printf "/%s" $last) (trimSuffix "/" $image.repository) | default "REGISTRY/FOLDER")) -}}
{{- end -}}
{{- end -}}

{{/* A name without a registry would be anybody's on a public one. */}}
{{- define "stage2.validateImages" -}}
{{- $image := .Values.image | default dict -}}
{{- if not (or $image.repository (and $image.controller $image.trainer)) -}}
{{- fail "image.repository is required; set it to the folder of a registry that has the images controller and trainer. Or set both image.controller and image.trainer. From a clone: docker build -f images/controller.Dockerfile -t REGISTRY/controller:TAG . and the same for trainer; docker push both; then --set image.repository=REGISTRY,image.tag=TAG. If you upgrade, use --reset-then-reuse-values instead of --reuse-values" -}}
{{- end -}}
{{- if contains "://" ($image.repository | default "") -}}
{{- fail (printf "image.repository: %s: must name a registry as images do, without a scheme; write %s" $image.repository (splitList "://" $image.repository | last)) -}}
{{- end -}}
{{- end -}}

{{/* The account that pods of the namespace have by default would have the controller's rights, and so would they. */}}
{{- define "stage2.validateServiceAccount" -}}
{{- if not (or .Values.serviceAccount.create .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.name is required where serviceAccount.create is false; name an account that only the controller has, or set serviceAccount.create=true" -}}
{{- end -}}
{{- end -}}

{{/* A Role in a namespace that does not exist fails when half of the release is made. `lookup` finds nothing where no
     server is asked (helm template): a namespace is missing only where `default`, which always exists, is found. */}}
{{- define "stage2.validateNamespaces" -}}
{{- range .Values.controller.namespaces -}}
{{- if and (not (lookup "v1" "Namespace" "" .)) (lookup "v1" "Namespace" "" "default") -}}
{{- fail (printf "controller.namespaces: there is no namespace %s; create it first, or take it out" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The controllers in a namespace, in all for "": {"controllers": [...]}, each with its release, its namespace and those that
     it serves, none for all. Their pods' label counts: it is stage2's own, whatever chart and release are called. */}}
{{- define "stage2.controllers" -}}
{{- $found := list -}}
{{- range (lookup "apps/v1" "Deployment" . "").items -}}
{{- if eq (dig "spec" "template" "metadata" "labels" "stage2.dev/role" "" .) "controller" -}}
{{- $release := dig "metadata" "labels" "app.kubernetes.io/instance" .metadata.name . -}}
{{- $serves := list -}}
{{- range .spec.template.spec.containers -}}
{{- range .args -}}
{{- if hasPrefix "--namespace=" . -}}
{{- $serves = append $serves (trimPrefix "--namespace=" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found = append $found (dict "release" $release "namespace" .metadata.namespace "serves" $serves) -}}
{{- end -}}
{{- end -}}
{{- dict "controllers" $found | toJson -}}
{{- end -}}

{{/* The definition stays when its release is uninstalled (crd.keep), with that release's name on it. Once its controller is
     gone, helm itself refuses, and takes the definition over with --take-ownership, which no template can see. */}}
{{- define "stage2.validateDefinition" -}}
{{- with and .Values.crd.install (lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "rolloutmatchingjobs.stage2.dev") -}}
{{- $release := dig "annotations" "meta.helm.sh/release-name" "" .metadata -}}
{{- $namespace := dig "annotations" "meta.helm.sh/release-namespace" "" .metadata -}}
{{- if and $release $namespace (not (and (eq $release $.Release.Name) (eq $namespace $.Release.Namespace))) -}}
{{- range (include "stage2.controllers" $namespace | fromJson).controllers -}}
{{- if eq .release $release -}}
{{- fail (printf "crd.install: true; the definition rolloutmatchingjobs.stage2.dev belongs to the release %s in the namespace %s; set crd.install=false, and in both releases controller.namespaces to namespaces of their own; or uninstall that one, and run this again with --take-ownership" $release $namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What two lists of namespaces have in common, where an empty list is all of them; nothing where they are apart. */}}
{{- define "stage2.common" -}}
{{- $one := index . 0 -}}
{{- $other := index . 1 -}}
{{- if not (or $one $other) -}}
all namespaces
{{- else if not (and $one $other) -}}
{{- printf "the namespaces %s" (join ", " ($one | default $other)) -}}
{{- else -}}
{{- $both := list -}}
{{- range $one -}}
{{- if has . $other -}}
{{- $both = append $both . -}}
{{- end -}}
{{- end -}}
{{- if $both -}}
{{- printf "the namespaces %s" (join ", " $both) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Two controllers of one job undo each other's work. A release that makes nothing of the cluster may come from somebody who
     cannot list the Deployments of all namespaces, and does not look. One that shares namespaces already may be upgraded:
     that is how it is given others. */}}
{{- define "stage2.validateServed" -}}
{{- $c := .Values.controller -}}
{{- if or (not $c.namespaces) $c.placement $c.kueue .Values.crd.install .Values.rbac.aggregate .Values.policy.admission -}}
{{- $mine := $c.namespaces | default list -}}
{{- $before := false -}}
{{- $others := list -}}
{{- range (include "stage2.controllers" "" | fromJson).controllers -}}
{{- if and (eq .release $.Release.Name) (eq .namespace $.Release.Namespace) -}}
{{- $before = . -}}
{{- else -}}
{{- $others = append $others . -}}
{{- end -}}
{{- end -}}
{{- range $others -}}
{{- $shared := include "stage2.common" (list $mine .serves) -}}
{{- if and $shared (not (and $before (include "stage2.common" (list (dig "serves" list ($before | default dict)) .serves)))) -}}
{{- fail (printf "controller.namespaces: the release %s in the namespace %s serves %s too, and of two controllers each undoes the other's work; set controller.namespaces in both releases to namespaces of their own, or uninstall one" .release .namespace $shared) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
