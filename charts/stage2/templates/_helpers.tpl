{{/* A name of at most 63 characters, which ends with a letter or a digit wherever it is cut. */}}
{{- define "stage2.cut" -}}
{{- regexReplaceAll "[-.]+$" (trunc 63 .) "" -}}
{{- end -}}

{{- define "stage2.name" -}}
{{- default .Chart.Name .Values.nameOverride | include "stage2.cut" -}}
{{- end -}}

{{- define "stage2.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- include "stage2.cut" .Values.fullnameOverride -}}
{{- else if contains (include "stage2.name" .) .Release.Name -}}
{{- include "stage2.cut" .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "stage2.name" .) | include "stage2.cut" -}}
{{- end -}}
{{- end -}}

{{/* Of the Service for metrics. Its name is a DNS label that begins with a letter; other names may have dots and be longer. */}}
{{- define "stage2.metricsName" -}}
{{- $name := include "stage2.fullname" . | replace "." "-" -}}
{{- $name = ternary $name (printf "s-%s" $name) (regexMatch "^[a-z]" $name) -}}
{{- printf "%s-metrics" ($name | trunc 55 | include "stage2.cut") -}}
{{- end -}}

{{- define "stage2.selectorLabels" -}}
app.kubernetes.io/name: {{ include "stage2.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: controller
{{- end -}}

{{- define "stage2.labels" -}}
{{ include "stage2.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Of the controller's pods. By stage2.dev/role the NetworkPolicy of every job knows them, whatever the release is called. */}}
{{- define "stage2.podLabels" -}}
{{ include "stage2.labels" . }}
stage2.dev/role: controller
{{- end -}}

{{/* The image `controller` or `trainer`. */}}
{{- define "stage2.image" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $image := $root.Values.image -}}
{{- $repository := $image.repository | default "" | trimSuffix "/" -}}
{{- get $image $name | default (printf "%s/%s:%s" $repository $name ($image.tag | default $root.Chart.AppVersion)) -}}
{{- end -}}

{{- define "stage2.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "stage2.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* A number as people write it. Helm has all numbers of a values file as floats, and would print a million as 1e+06. */}}
{{- define "stage2.number" -}}
{{- if eq (floor .) (float64 .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* Releases that serve namespaces of their own may live side by side. No namespace has a dot, and so no two of them make
     one name of a namespace and a full name, such as team and x-stage2, team-x and stage2. */}}
{{- define "stage2.clusterRoleName" -}}
{{- if .Values.controller.namespaces -}}
{{- printf "%s.%s" .Release.Namespace (include "stage2.fullname" .) -}}
{{- else -}}
{{- include "stage2.fullname" . -}}
{{- end -}}
{{- end -}}

{{/* What the controller does, and nothing else. ConfigMaps and Secrets: by name, never listed.
     get: before the first apply, whether somebody else's object has the name. */}}
{{- define "stage2.rules" -}}
- apiGroups: [stage2.dev]
  resources: [rolloutmatchingjobs]
  verbs: [list, watch, delete]  # delete: spec.ttlSecondsAfterFinished
- apiGroups: [stage2.dev]
  resources: [rolloutmatchingjobs/status]
  verbs: [patch]
- apiGroups: [stage2.dev]
  resources: [rolloutmatchingjobs/finalizers]  # children may block the deletion of their owner
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]  # patch: the number of servers with engine JobSet
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: [get, create, delete]  # of jobs with engine JobSet
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, delete]  # delete: of the job's own whose certificates end, once no pod holds them
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]  # list: those of a learner's Job whose pod nobody makes; patch: to count equal ones
- apiGroups: [""]
  resources: [resourcequotas]
  verbs: [list, watch]
{{- if .Values.controller.kueue }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]  # delete: of a failed run, whose job was corrected
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
{{- end }}
{{- end -}}

{{/* What has no namespace, or is of all: nodes and the pods that take their room, priorities, what Kueue adds to pods. */}}
{{- define "stage2.clusterRules" -}}
{{- if .Values.controller.placement }}
- apiGroups: [""]
  resources: [nodes, pods]
  verbs: [list, watch]
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [get]
{{- end }}
{{- if .Values.controller.kueue }}
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors, workloadpriorityclasses]
  verbs: [get]
{{- end }}
{{- end -}}

{{/* The admin's policy as JSON, for admission and the controller alike: folders without a slash at their end. */}}
{{- define "stage2.policy" -}}
{{- $policy := omit .Values.policy "admission" -}}
{{- range tuple "hostPaths" "writableHostPaths" "nfs" -}}
{{- $entries := list -}}
{{- range get $policy . -}}
{{- $entries = append $entries (regexReplaceAll "/+$" . "") -}}
{{- end -}}
{{- $_ := set $policy . $entries -}}
{{- end -}}
{{- $groups := list -}}
{{- range $policy.groups -}}
{{- $groups = append $groups (ternary . (int64 .) (kindIs "string" .)) -}}
{{- end -}}
{{- $_ := set $policy "groups" $groups -}}
{{- toJson $policy -}}
{{- end -}}

{{/* CEL's text of an absolute path's pattern; `.` and `..` are refused besides. */}}
{{- define "stage2.plainPath" -}}
'^(/[^/]+)+$'
{{- end -}}
